"""Black-box agent programs: a process per trajectory that calls the policy through an OpenAI-compatible proxy. docs/agents.md.

agent program ──HTTP──► proxy ──► session ──submit──► engine
     ▲                              │  ▲                 │
     │ stdin, exit, stdout          ▼  └──── outputs ────┘
  program                      transcript ──► tokens, log-probs, sources of one trajectory
"""
