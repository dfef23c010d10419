"""Who a peer is, how to reach it, and how to move named blobs and signed records between peers."""
