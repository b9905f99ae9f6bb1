"""The plug-ins against the real verl, TransferQueue and a local Ray (`make test-verl`)."""
