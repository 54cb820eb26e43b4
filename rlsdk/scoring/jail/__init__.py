"""What runs inside the sandbox: standard library only, in an interpreter that has seen no package, nor all of rlsdk."""
