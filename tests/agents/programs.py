"""A program that is an agent: it asks the model once, and writes the answer into a file."""

AGENT = """
import json, os, urllib.request

def post(url, body, key):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"x-api-key": key})
    return json.load(urllib.request.urlopen(request))

url, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"]
chat = [{"role": "user", "content": os.environ["HELMSMAN_TASK"]}]
answer = post(url + "/v1/messages", {"max_tokens": 4, "messages": chat}, key)
open("answer.txt", "w").write(str(answer["content"]))
"""
