"""The steps of a run, one module each; `compressor.run.walk` walks their list."""
