"""The reconcile loop: observe, plan, decide, execute, report.

`standalone` runs it over a file for `dsv4 up`, `operator` over all deployments of a cluster.
"""
