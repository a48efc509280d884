"""The soak: 32 clients mix everything a server does, for long, and every answer is checked (`python -m tests.soak`)."""
