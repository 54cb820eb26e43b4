"""`rlsdk new`: write the files of a new plugin from templates."""
