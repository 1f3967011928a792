"""The planner: what a plan is, what it costs on any machine, and which plan is best. No torch.

A room imports only those below it (`make lint` checks it):

    report       what `argosy plan` says                      scaling_law   needs none of the others
    search       the plans worth a look, and the best of them: for `argosy plan`, for plan = "auto", after a failure
    calibration  what finished runs teach the cost model
    cost         memory, traffic, time, failures, money and energy of plans, in closed form
    hardware     devices, clusters, the machine at hand
    rules        which plans can train a run
    layouts      many plans as columns
    plan         one plan
    pipeline     schedules, and how layers are dealt to stages
    workload     parameters and FLOPs of a model
"""
