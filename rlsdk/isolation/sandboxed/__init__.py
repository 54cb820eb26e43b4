"""Code that runs inside the sandbox: standard library only, without packages and without the rest of rlsdk."""
