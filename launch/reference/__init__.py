"""The embedded reference model: its data, its tokenizer and the one script that trains it.

``corpus`` reads the classification sets and keeps the held-out part away from training, ``tokenizer`` builds the
tokenizer, ``tokens`` holds a corpus as tokens, ``utterances`` and ``episodes`` turn these into in-context-learning
episodes, ``model`` is the plain PyTorch Llama that ``train`` optimises and exports. ``sglang-ext bench reference``
measures the result.
"""
