"""The web page of runs in folders, `rlrun ui`: what `rlrun.inspect` reads, as JSON, and the static files that show it.

`registry` knows the runs that may be shown and `confine` keeps reads inside their folders; `steps` and `traces` index large files once;
`overview`, `rollout_views` and `tokens` make the typed answers of `models`; `app` has the routes, `guard` what stands before them, `live`
the events, `server` the socket. The page's sources are in `web/`, what they build in `static/`.
"""
