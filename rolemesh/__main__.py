"""`python -m rolemesh`: the command line."""

from rolemesh.services.command_line.app import main

if __name__ == "__main__":
    main()
