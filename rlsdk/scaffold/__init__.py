"""`rlsdk new`: packages and files to begin a plugin from, written from templates that travel with rlsdk."""
