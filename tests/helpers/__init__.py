"""What several tests share: small tasks and searches, run folders, launchers of processes."""
