"""A wide-area network on one machine: namespaces joined by a router in user space. Linux and root only."""
