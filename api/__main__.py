"""`python -m precast`: the command line, for an interpreter whose scripts are not on the path."""

from precast.cli.main import main

main(prog_name="precast")
