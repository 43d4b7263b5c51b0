"""Instruction prompts put together from templates: kinds of task that a small model seldom asks itself about.

The self-asked questions lean to advice and lists. Drafts also meet roles, code, sums, riddles, and texts to work on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator


WORDS = {
    "place": (
        "Iceland|Morocco|the Scottish Highlands|Vietnam|Lisbon|Peru|Nairobi|a small island in Greece|New "
        "Orleans|the Norwegian fjords|Kyoto|Istanbul|rural Kansas|Prague|the Sahara|Buenos Aires"
    ),
    "topic": (
        "urban gardening|electric bicycles|remote work|coral reefs|public libraries|space tourism|sourdough "
        "baking|renewable energy|sleep|museum visits|school uniforms|coffee|digital "
        "privacy|chess|volunteering|recycling|artificial intelligence|mental health|board games|local "
        "elections|water conservation|bees|budget "
        "travel|podcasts|vaccines|satellites|earthquakes|inflation|migration|jazz"
    ),
    "person": (
        "your manager|a new colleague|your landlord|a former teacher|a customer who is unhappy|the city council|a "
        "shy friend|the head of marketing|a potential investor|your neighbor|a scholarship committee|your football"
        " coach"
    ),
    "purpose": (
        "asking for an extension of a deadline|proposing a new project|thanking them for their support|apologizing"
        " for a late delivery|inviting them to a workshop|requesting feedback on a report|declining an offer "
        "politely|announcing a change in schedule|asking for a recommendation letter"
    ),
    "scene": (
        "an abandoned lighthouse|a train that never stops|a crowded harbor at dawn|a library at midnight|a "
        "mountain village in winter|a robot's first day at school|a letter found in an old coat|a storm at sea|a "
        "secret garden|the last bookstore in town|a birthday party that goes wrong|a desert road at night"
    ),
    "role": (
        "a pirate captain|Sherlock Holmes|a medieval blacksmith|an experienced chef|a travel guide in Rome|a "
        "career counselor|Albert Einstein|a grumpy cat|a financial advisor|an astronaut on Mars|Cleopatra|a "
        "fitness trainer|a river|a science journalist|a detective|Shakespeare|a software engineer|an old sailing "
        "ship|Batman|a history teacher|a psychologist|a stand-up comedian"
    ),
    "request": (
        "explain why the sky is blue|describe a typical day in your life|give me advice on learning a new "
        "language|tell me about your greatest achievement|explain how a computer works|tell me how to deal with "
        "stress|introduce yourself to a room of strangers|tell me what you think about modern technology|help me "
        "plan a dinner for six people|answer my question: is it better to rent or to buy a house?|explain what "
        "gravity is|convince me to take up running"
    ),
    "name": "Anna|Omar|Lucy|Peter|Mei|Carlos|Nadia|Tom|Priya|Jonas|Grace|Ivan|Sofia|Ben",
    "thing": "apples|pencils|tickets|marbles|cookies|books|stickers|eggs|notebooks|coins|flowers|bottles",
    "language": "Python|Python|Python|C++|Java|JavaScript|C|Go|Rust",
    "code": (
        "reverse a linked list|check whether a string is a palindrome|sort a list of dictionaries by a key|count "
        "the vowels in a text|compute the greatest common divisor of two numbers|find all prime numbers below "
        "n|merge two dictionaries|remove duplicates from a list while keeping the order|find the longest word in a"
        " sentence|implement a stack with push and pop|implement binary search|check whether brackets are "
        "balanced|rotate a matrix by 90 degrees|compute the factorial of a number|find the second largest number "
        "in a list|convert a Roman numeral to an integer|find the shortest path in a graph with breadth-first "
        "search|count how often each word occurs in a file|validate an email address|transpose a matrix|compute "
        "the edit distance of two strings|implement a queue with two stacks|flatten a nested list|find two numbers"
        " in an array that add up to a target|compute the depth of a binary tree|insert a key into a binary search"
        " tree|shuffle a deck of cards|parse a CSV file|print a multiplication table|implement quicksort|detect a "
        "cycle in a linked list|group words that are anagrams|compute the power of a number with "
        "recursion|generate all permutations of a string"
    ),
    "page": (
        "a to-do list|a countdown timer|a contact form|a photo gallery|a calculator|a page that changes its "
        "background color when a button is clicked|a quiz with three questions|a digital clock"
    ),
    "science": (
        "osmosis|plate tectonics|the greenhouse effect|Newton's third law|how vaccines work|entropy|natural "
        "selection|the periodic table|semiconductors|the water cycle|black holes|enzymes|radioactive decay|how a "
        "transistor works|the Doppler effect|mitosis and meiosis|acids and bases|neural networks|the immune "
        "system|how an airplane wing produces lift|electromagnetic induction|DNA replication|chemical "
        "equilibrium|the theory of relativity|blood circulation|supply chains|databases|public-key "
        "encryption|overfitting|ocean currents"
    ),
    "pair": (
        "mitosis and meiosis|speed and velocity|ionic and covalent bonds|a virus and a bacterium|supervised and "
        "reinforcement learning|weather and climate|AC and DC|plant cells and animal cells|conduction and "
        "convection|RAM and a hard disk|correlation and causation|nuclear fission and fusion|TCP and UDP|kinetic "
        "and potential energy|fiscal and monetary policy|stoicism and epicureanism|a republic and a "
        "democracy|novels and short stories|impressionism and cubism"
    ),
    "history": (
        "the French Revolution|the Silk Road|the invention of the printing press|the fall of the Roman Empire|the "
        "Industrial Revolution|the Cold War|the Renaissance|the Great Depression|the Ottoman Empire|women's "
        "suffrage|the Marshall Plan|ancient Egypt|the Black Death|decolonization in Africa|the Enlightenment|the "
        "Meiji Restoration|the Civil Rights Movement"
    ),
    "idea": (
        "utilitarianism|free will|the social contract|supply and demand|confirmation bias|cultural "
        "identity|freedom of speech|globalization|opportunity cost|the tragedy of the commons|existentialism|human"
        " rights|the placebo effect|propaganda|nationalism|the sunk cost fallacy|comparative advantage|Plato's "
        "cave|game theory|civil disobedience"
    ),
    "class": "poetry|geography|statistics|music|chemistry|economics|ancient history|biology|grammar|philosophy",
    "review": (
        "The food was cold and the waiter ignored us for half an hour.|A lovely little hotel; the staff went out "
        "of their way to help.|The battery lasts two days but the screen scratches easily.|I could not put the "
        "book down, although the ending felt rushed.|The course was well organized, yet far too expensive.|Great "
        "sound, poor build quality, and it arrived late.|An unforgettable film with a brilliant lead actress.|The "
        "app crashes every time I open the settings."
    ),
    "passage": (
        "In 1998, Maria Lopez founded a small bakery in Valencia with her brother Juan. Ten years later it had 14 "
        "shops and 230 employees, and in 2012 it was sold to Northern Foods for 9 million euros.|The Danube is "
        "2,850 km long and flows through ten countries before it reaches the Black Sea. Vienna, Budapest and "
        "Belgrade lie on its banks.|On Monday the museum opened a new wing designed by Akira Sato. The mayor, "
        "Helen Brooks, praised the project, which cost $32 million and took five years.|Dr. Amara Okafor of the "
        "University of Lagos reported that the new treatment reduced symptoms in 64 percent of 310 patients, while"
        " side effects were mild.|The meeting begins at 9:30 in room 204. Please bring the sales figures for March"
        " and April, and send questions to Paul Reed before Friday.|Solaris Inc. reported revenue of $4.2 billion "
        "in 2020 and $5.1 billion in 2021, while its rival Lumen Corp. fell from $3.9 billion to $3.4 "
        "billion.|Emma planted tomatoes in April, beans in May and lettuce in June. By August the tomatoes were "
        "ripe, but slugs had eaten the lettuce.|The old oak by the river was struck by lightning in July. The "
        "villagers wanted to cut it down, but a year later new leaves grew from its trunk."
    ),
    "wrong": (
        "She dont like to goes to school becaus it are boring and she have no freinds there.|Yesterday me and him "
        "was walking in the park when we seen a big dog who was barking loud.|The informations you gave me was "
        "very usefull, but I still has alot of question.|If I would have knew about the party, I will came with a "
        "cake what my mother baked."
    ),
    "odd": (
        "apple, carrot, banana, cherry|violin, trumpet, cello, guitar|Mercury, Venus, Moon, Mars|whale, shark, "
        "dolphin, seal|oak, pine, rose, maple|hammer, nail, saw, screwdriver"
    ),
}

TEMPLATES = {
    "writing": (
        "Write a blog post about {topic} for people who know little about it.|Write a travel article about a week "
        "in {place}, with its food and its people.|Write a short email to {person} {purpose}.|Draft a formal "
        "letter to {person} {purpose}. Keep it under {n} words.|Write a short story about {scene}.|Write a poem "
        "about {scene} in {k} stanzas.|Write the opening paragraph of a novel set in {place}, beginning with "
        "{scene}.|Describe {scene} using all five senses.|Outline an article that compares two views on "
        "{topic}.|Write {k} catchy headlines for an article about {topic}.|Write a persuasive speech about "
        "{topic}.|Write a dialogue between {role} and {role} about {topic}.|Correct the grammar of this text: "
        "{wrong}|Rewrite the following sentence so that it sounds more professional: {wrong}|Write a product "
        "description for a new device that helps with {topic}."
    ),
    "roleplay": (
        "You are {role}. {Request}.|Pretend to be {role} and {request}. Stay in character.|Act as {role}. I will "
        "ask you questions and you answer as that character would. First question: {request}.|Imagine you are "
        "{role} and have to talk about {topic}. What would you say?|I want you to act as {role}. My first request:"
        " {request}.|From now on speak like {role}. What do you think about {topic}?|Take the role of {role} in an"
        " interview about {topic}. Answer the question: what surprised you the most?"
    ),
    "reasoning": (
        "{name} is taller than {name2}, and {name2} is taller than {name3}. Who is the shortest? Explain.|Which "
        "word does not belong with the others, and why? {odd}|{name} has {k} brothers, and each brother has one "
        "sister. How many sisters does {name} have?|If all roses are flowers and some flowers fade quickly, do "
        "some roses fade quickly? Explain your reasoning.|{name} walks {n} meters north, then {m} meters east, "
        "then {n} meters south. How far is {name} from the start?|A farmer has {n} sheep and all but {k} run away."
        " How many are left?|{name} left the house with an umbrella although the sun was shining. Give {k} "
        "possible reasons.|Read the text and answer: who or what changed, and why? {passage}|Is the following "
        "argument valid? Everyone who likes {topic} likes to read. {name} likes to read. So {name} likes "
        "{topic}.|What comes next: {k}, {k2}, {k4}, {k8}? Explain step by step."
    ),
    "math": (
        "{name} buys {n} {thing} at ${k} each and pays with a $500 bill. How much change does {name} get?|Solve "
        "for x: {k}x + {n} = {m}.|What is {n} percent of {m}?|A rectangle is {n} cm long and {k} cm wide. What are"
        " its area and its perimeter?|If f(x) = {k}x^2 - {n}x + {m}, what is f(3)?|A car drives {m} km in {k} "
        "hours. What is its average speed? How long does it take for {n} km?|A bag holds {n} red and {k} blue "
        "{thing}. What is the probability of drawing a blue one?|{name} has {n} {thing}, gives {k} to {name2} and "
        "then doubles what is left. How many does {name} have now?|Simplify the expression ({k}x + {n})(x - "
        "{k}).|What is the remainder when {m} is divided by {k}?|The sum of three consecutive numbers is {m3}. "
        "What are the numbers?|Find the slope of the line through ({k}, {n}) and ({n}, {m}).|{name} invests ${m}00"
        " at {k} percent interest a year. How much is it worth after two years?|In a class of {m} students, {n} "
        "play football and {k} play both football and tennis. How many play only football?|How many integers "
        "satisfy |x - {k}| < {n}?"
    ),
    "coding": (
        "Write a {language} function to {code}.|Write a {language} program to {code}, and explain how it "
        "works.|How can I {code} in {language}?|Implement a function in {language} to {code}. What is its time "
        "complexity?|Write a simple HTML page with {page}.|Write unit tests for a Python function that should "
        "{code}.|Explain step by step how to {code} without using any library.|Write an SQL query that lists the "
        "{k} customers with the highest total of orders.|Here is a Python function: def f(x): return [i for i in "
        "range(x) if i % {k} == 0]. What does it do, and how could it be improved?|Fix the bug in this Python "
        "code: for i in range({n}) print(i)|Write a {language} class for a bank account with deposit and withdraw "
        "methods."
    ),
    "extraction": (
        "Extract all names, places and dates from this text: {passage}|Identify the people, organizations and "
        "locations in the following text and return them as JSON: {passage}|Summarize the following text in one "
        "sentence: {passage}|List all the numbers in the following passage and say what they refer to: "
        "{passage}|Rate the following reviews on a scale of 1 to 5 and return the ratings as a list: 1. {review} "
        "2. {review2}|Is each of these reviews positive or negative? 1. {review} 2. {review2}|Read the text and "
        "answer the questions. {passage} Questions: 1. What is the text about? 2. Which numbers are given?|Turn "
        'the following text into a table: {passage}|Count how often the word "the" occurs in this text: '
        "{passage}|Classify the sentence as news, review or instruction: {passage}"
    ),
    "stem": (
        "Explain {science} to a high school student.|What is {science}, and why does it matter?|Please explain the"
        " difference between {pair} and give an example of each.|Describe the main stages of {science}.|How would "
        "you design an experiment to demonstrate {science}?|What are the most common misconceptions about "
        "{science}?|Give {k} real-world applications of {science}.|How do scientists study {science}? Describe two"
        " methods.|Suppose you have to build a {n} kW solar plant for a village in {place}. What has to be "
        "considered?|A stone falls from a height of {n} meters. How long does it take to reach the ground?"
    ),
    "humanities": (
        "What were the main causes of {history}?|How did {history} change everyday life?|Explain {idea} and give "
        "{k} examples.|Discuss the arguments for and against {idea}.|Compare {pair}.|Create a lesson plan about "
        "{history} for a class in {class}.|Suggest {k} books about {history} with a short description of each.|How"
        " are {idea} and {idea2} related?|What can we learn today from {history}?|What customs should a visitor "
        "know before a trip to {place}?|How does {idea} influence modern politics?|Design a classroom activity "
        "that brings {class} and {topic} together."
    ),
}


def written_prompts(seed: int = 0) -> Iterator[str]:
    """Endless prompts, the kinds of task in turn at random, with random words filled in."""
    chooser = random.Random(seed)
    words = {name: options.split("|") for name, options in WORDS.items()}
    # The bars of an absolute value in a template are no separators.
    templates = [text.replace("|x - {k}|", "\x00").split("|") for text in TEMPLATES.values()]
    while True:
        fill: dict[str, str | int] = {name: chooser.choice(options) for name, options in words.items()}
        fill |= {name + "2": chooser.choice(words[name]) for name in ("name", "review", "idea")}
        request = str(fill["request"])
        small, middle, large = chooser.randint(2, 9), chooser.randint(10, 60), chooser.randint(61, 400)
        fill |= {
            "k": small,
            "k2": 2 * small,
            "k4": 4 * small,
            "k8": 8 * small,
            "n": middle,
            "m": large,
            "m3": 3 * large,
        }
        fill |= {"name3": chooser.choice(words["name"]), "Request": request[0].upper() + request[1:]}
        template = chooser.choice(chooser.choice(templates)).replace("\x00", "|x - {k}|")
        yield template.format(**fill)
