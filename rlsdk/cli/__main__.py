"""`python -m rlsdk.cli`: the command `rlsdk` of this interpreter."""

from rlsdk.cli import main

if __name__ == "__main__":
    main()
