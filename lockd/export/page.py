"""The page at /: what there is."""

PAGE = b"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>lockd</title></head>
<body>
<h1>lockd</h1>
<p>Where the threads of this host wait, for how long, on what, and who makes them wait.</p>
<ul>
<li><a href="metrics">/metrics</a>: for Prometheus</li>
<li><a href="api/v1/locks">/api/v1/locks</a>: the most contended locks (JSON)</li>
<li><a href="api/v1/threads">/api/v1/threads</a>: the threads that wait most (JSON)</li>
<li><a href="api/v1/deadlocks">/api/v1/deadlocks</a>: threads that wait for each other (JSON)</li>
<li>/flamegraph: where threads wait since the start (of 10 s: &amp;seconds=10), as flame graphs:
<a href="flamegraph?program=futex">locks of programs</a>,
<a href="flamegraph?program=kernel_locks">locks of the kernel</a>,
<a href="flamegraph?program=offcpu">anything off the CPU</a></li>
<li>/debug/pprof: the same for <code>go tool pprof</code>:
<a href="debug/pprof/futex">futex</a>,
<a href="debug/pprof/kernel_locks">kernel_locks</a>,
<a href="debug/pprof/offcpu">offcpu</a></li>
<li><a href="-/healthy">/-/healthy</a>: whether this process serves</li>
<li><a href="-/ready">/-/ready</a>: whether the sampler answers too</li>
<li><a href="-/settled">/-/settled</a>: answers once everything that happened before is counted</li>
</ul>
</body>
</html>
"""
