"""An agent of two calls: it has a word spelled backward, asks once more below the first answer, and prints the second.

Nothing in it is Laminar's: it would work against any OpenAI-compatible server that has completions.
"""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit


def complete(prompt: str) -> str:
    server = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(server.netloc)
    body = {"model": os.environ["OPENAI_MODEL"], "prompt": prompt, "max_tokens": 12}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection.request("POST", f"{server.path}/completions", json.dumps(body), headers)
    answer = json.load(connection.getresponse())
    if "error" in answer:
        raise SystemExit(answer["error"]["message"])
    return answer["choices"][0]["text"]


question = json.load(sys.stdin)["prompt"]
word = question.split()[-1]
draft = complete(question)
print(complete(f"{question}{draft}\n{word}\n"))
