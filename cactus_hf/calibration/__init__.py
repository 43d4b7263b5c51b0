"""What each delta and rule gives on a user's own prompts, from the exact laws at the positions of lossless texts.

`sampling.py` writes the texts and reads both models' laws along them; `laws.py` evaluates every rule at each position;
`rounds.py` weights the positions as rounds of decoding would verify them; `files.py` keeps the sums of each prompt;
`result.py` answers from the sums.
"""
