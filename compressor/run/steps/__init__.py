"""The steps of a run, one module each; `compressor.run.pipeline` walks their list."""
