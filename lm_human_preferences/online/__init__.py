"""Labels that are collected while a policy trains, and the reward model that learns from them anew.

Knows the folder of labels, through which alone it and the labellers know each other; does not know
who answers, nor how the policy learns.

    collection.py  a hook of the policy's training: ask, wait for answers, train the reward model
    questions.py   questions about the policy as it is, the same after an interruption
    decisions.py   what depended on the answers that were there at the time: used.jsonl
    answers.py     answers as labels, and what they tell of the policy
    retraining.py  training the reward model anew
    progress.py    what people see
"""
