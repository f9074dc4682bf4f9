"""Web page for runs in folders (`rlrun ui`): a JSON API over the data of `rlrun.inspect`, and the static files of the page.

`run_registry` lists the runs that may be shown, and `confine` restricts reads to their folders. `steps` and `traces` index large files
once. `overview`, `rollout_views` and `rollout_tokens` build the responses of `run_answers` and `rollout_answers`. `app` has the routes,
`guard` the checks before them, `live` the events, `page_server` the socket. The sources of the page are in `web/`, the built page in
`static/`.
"""
