"""`python -m compressor.cli`: the command under a chosen Python interpreter, e.g. for `accelerate launch -m`."""

from compressor.cli import main

main()
