"""Word problems written for this package, so that `gsm8k` runs without a download."""

from __future__ import annotations

PROBLEMS: tuple[tuple[str, str], ...] = (
    ("A ferry carries 14 cars on each trip and makes 6 trips a day. How many cars does it carry in 5 days?", "420"),
    ("Nora picks 3 baskets of 18 plums, gives 10 plums away and packs the rest into bags of 4. How many bags?", "11"),
    ("A tank holds 240 litres. A third is used on Monday and half of what is left on Tuesday. How much is left?", "80"),
    ("Tickets cost 7 euros for adults and 4 for children. What do 3 adults and 5 children pay together?", "41"),
    ("A train leaves at 9:40 and arrives at 13:05. How many minutes does the journey take?", "205"),
    ("Ivo reads 12 pages a day and has read 84 of 300 pages. In how many more days does he finish?", "18"),
    ("A rope of 5 metres is cut into pieces of 40 centimetres. How many centimetres are left over?", "20"),
    ("Eggs come in boxes of 10. A bakery needs 4 eggs for each of 33 cakes. How many boxes must it buy?", "14"),
    ("A shirt costs 60 euros and is reduced by 15 percent. What does it cost now, in euros?", "51"),
    ("Two numbers add up to 50, and one is 8 more than the other. What is the larger one?", "29"),
    ("Lea runs 400 metres in 80 seconds. How many metres does she run in 5 minutes at this speed?", "1500"),
    ("A class of 28 has 4 more girls than boys. How many boys are there?", "12"),
)
"""Question and answer."""
