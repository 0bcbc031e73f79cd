"""Where model folders come from: names we know, Hugging Face ids and folders on this machine.

Knows nothing about how a model is run; every function ends in a Hugging Face folder
(``config.json``, safetensors, ``tokenizer.json``).
"""
