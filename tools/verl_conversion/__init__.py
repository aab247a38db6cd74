"""What `tools/convert_verl.py` is made of: a verl launch in, one of our configurations out.

launches    a script or an argv   ->  ways: overrides, program, environment
overrides   one override          ->  key and value, by hydra's grammar
releases    data/settings.tsv     ->  which keys a release of verl has, with which defaults
composed    overrides on defaults ->  what verl would run with, and what it would refuse
situations  a configuration       ->  what of it decides what else is read
readers     facts about verl      ->  labels: what is read, what is not, and how that is known
carry_*     verl's meaning        ->  our settings
conversion  all of it             ->  a line for every override, and a configuration
report      lines                 ->  a table, JSON
recipe_file settings              ->  TOML, checked with `rl_contracts.load_config`
"""
