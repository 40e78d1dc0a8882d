"""Generation of text: graphs with key/value caches, sessions that keep them, and transformers' own `generate`."""
