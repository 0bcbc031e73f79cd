"""Workers without weights: they take as long as a profile says, and their output is a hash of the prefix.

Everything else is real: the services, the streams, the codec, page grants and every check. So the
orchestrator can be measured at the speed of GPUs that are not there, and still be held to exactness:
the text depends on every token before it, and on nothing else.
"""
