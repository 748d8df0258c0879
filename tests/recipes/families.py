"""Chat templates in the forms of model families that TRL has no templates of."""

from __future__ import annotations

FAMILIES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    " {{ m.content }}{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}"
    "{% endfor %}",
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.index0 == 1 and messages[0].role == 'system' %}<<SYS>>\n{{ messages[0].content }}"
    "\n<</SYS>>\n\n{% endif %}{{ m.content | trim }} [/INST]{% elif m.role == 'assistant' %}"
    " {{ m.content | trim }} {{ eos_token }}{% elif m.role != 'system' or not loop.first %}"
    "{{ raise_exception('roles') }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "tulu": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "without end of turn": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "marked": "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}\n{% else %}{{ m.role }}:{{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
}
"""Template by name."""
