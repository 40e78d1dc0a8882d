"""`python -m compressor.cli`, the command under a Python of one's own choosing, e.g. for `accelerate launch -m`."""

from compressor.cli import main

main()
