"""queries.py FILE.jsonl: 320 requests for one sentence about everyday things, for a chat model."""

import json
import pathlib
import sys

FORMS = (
    'Write one sentence about {}.',
    'What do you think of {}? Answer in one sentence.',
    'Describe {} to a friend in one sentence.',
    'Tell me in one sentence what people say about {}.',
    'How was it with {} last week? One sentence, please.',
    'Write one sentence of a letter that mentions {}.',
    'Give me the first sentence of a story about {}.',
    'Somebody asks you about {}. What do you say, in one sentence?',
)
SUBJECTS = (
    'the sea',
    'rain in November',
    "my neighbour's dog",
    'Monday mornings',
    'a long train journey',
    'the food at work',
    'an old bicycle',
    'the queue at the post office',
    'learning to swim',
    'a broken umbrella',
    'the night shift',
    'a new haircut',
    'the first day of school',
    'a phone call from the bank',
    'the neighbours upstairs',
    'a birthday cake',
    'the way to the station',
    'a visit to the dentist',
    'moving to another town',
    'a letter from the tax office',
    'the village choir',
    'a cold bath',
    'the last bus home',
    'tomatoes from the garden',
    'a lost key',
    'the new manager',
    'a football match',
    'the waiting room',
    'a walk in the fog',
    'the smell of coffee',
    'an exam in mathematics',
    'a holiday with the family',
    'the price of bread',
    'a flat tyre',
    'winter in the mountains',
    'a song on the radio',
    'the hospital',
    'a game of chess',
    'the harbour at night',
    'a debt to an old friend',
)


def main() -> None:
    lines = [json.dumps(form.format(subject)) for subject in SUBJECTS for form in FORMS]
    pathlib.Path(sys.argv[1]).write_text('\n'.join(lines) + '\n')
    print(f'{len(lines)} queries in {sys.argv[1]}')


if __name__ == '__main__':
    main()
