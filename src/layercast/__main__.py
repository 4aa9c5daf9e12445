"""`python -m layercast`: the command line."""

from layercast.cli import main

if __name__ == "__main__":
    main()
