"""Labels that are collected while a policy trains, and the reward model that they retrain.

Knows the folder of labels, through whose files alone it communicates with the labellers; does not
know who answers, nor how the policy learns.

    collection.py  a hook of the policy's training: ask, wait for answers, train the reward model
    questions.py   questions about the policy as it is, the same after an interruption
    question_sampler.py  queries and samples that make a question, for `ask` too
    decisions.py   what was decided from the answers that were there at the time: used.jsonl
    answers.py     answers as labels, and what they tell about the policy
    retraining.py  retraining the reward model
    progress.py    what people see
"""
