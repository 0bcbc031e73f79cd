"""Making drafters: capture what the target writes, fit a head to it, judge the head as it will be served.

``capture`` writes shards (``shards``) of the target's own text with its hidden states; ``fit`` trains on them;
``evaluate`` asks the serving drafter. docs/training.md tells the whole way.
"""
