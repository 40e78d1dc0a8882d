"""Selection of blocks of attention maps to drop: average the maps, derive masks, train the model with the masks."""
