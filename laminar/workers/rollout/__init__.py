"""The rollout worker: one engine replica, its rewards, and its reports to the controller.

    controller ──AssignGroup──► worker ──submit──► engine ──on_finish──► reward pool
        ▲                         │  ▲                │                      │
        └───── RolloutReport ─────┘  └── relay lease ─┘      Rewarded ◄──────┘

Run it with ``python -m laminar.workers.rollout --controller URL --name rollout-0``.
"""
