"""`python -m service`: the command line."""

from service.cli import main

if __name__ == "__main__":
    main()
