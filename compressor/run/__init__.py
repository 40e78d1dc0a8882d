"""One run: from a model folder to a report. `pipeline` is the list of its stages."""
