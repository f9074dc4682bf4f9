"""Web page for runs in folders (`rlrun ui`): a JSON API over the data of `rlrun.inspect`, and the static files of the page.

`registry` lists the runs that may be shown, and `confine` restricts reads to their folders. `steps` and `traces` index large files once.
`overview`, `rollout_views` and `tokens` build the typed responses of `models`. `app` has the routes, `guard` the checks before them, `live`
the events, `server` the socket. The sources of the page are in `web/`, the built page in `static/`.
"""
