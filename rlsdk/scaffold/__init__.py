"""`rlsdk new`: writes the files of a new plugin from templates."""
