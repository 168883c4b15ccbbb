"""Entry point of `python -m paceline`, which torchrun needs."""

from paceline.cli import main

main()
