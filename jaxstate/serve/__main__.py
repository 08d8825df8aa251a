"""`python -m jaxstate.serve`."""

import sys

from jaxstate.serve.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
