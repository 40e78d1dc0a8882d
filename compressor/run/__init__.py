"""One run, from a model folder to a report. `pipeline` lists its stages."""
