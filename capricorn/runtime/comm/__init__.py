"""What ranks say to each other: replicas over sockets, idle signals in datagrams, small collectives."""
