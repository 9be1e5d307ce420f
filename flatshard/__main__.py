"""``python -m flatshard`` runs the same command line as the script ``flatshard``."""

import sys

from flatshard.checkpoint.command_line import main

if __name__ == "__main__":
    sys.exit(main())
