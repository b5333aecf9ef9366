"""What is claimed about speed and memory, as programs that anyone can run. See README.md in this folder."""
