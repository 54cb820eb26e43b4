"""Another lab's plugin: a workflow and a command; modules are imported by kind."""

MODULES = {"workflow": ("rlsdk_otherlab.workflows",)}
