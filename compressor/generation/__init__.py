"""Generation of text: graphs with key/value caches, engines that keep them, and transformers' own `generate`."""
