"""Monitoring: metrics, curves, the status page, dashboards and the archive of checkpoints."""
