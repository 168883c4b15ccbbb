"""`python -m paceline`, as torchrun starts it."""

from paceline.cli import main

main()
