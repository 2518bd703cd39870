"""What protoc made of the ``.proto`` files beside this one (``make stubs`` makes it again). Loads protobuf."""
