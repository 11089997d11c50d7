"""Words that the sample tokenizers encode as one token; they split all other words into pieces."""

from __future__ import annotations

__all__ = ["WORDS"]

_TEXT = """
a an the and or of in on at by for with from to into over under near behind between beside above
below is are was were be being has have it its his her their this that these those very not no
without two three

photo photograph picture image painting drawing sketch illustration render rendering portrait
landscape poster print watercolor oil acrylic pencil ink charcoal pastel digital art artwork concept
fantasy anime manga comic cartoon pixel vector isometric abstract surreal impressionist baroque
gothic cubist minimalist vintage retro modern futuristic cyberpunk steampunk medieval ancient
classical renaissance

astronaut man woman boy girl child person people king queen prince princess knight warrior wizard
witch robot android alien monster dragon unicorn angel demon ghost vampire pirate soldier sailor
farmer chef doctor artist

cat dog kitten puppy horse cow sheep goat pig rabbit fox wolf bear lion tiger elephant giraffe
monkey panda squirrel hedgehog deer mouse bird eagle owl parrot duck swan penguin chicken fish shark
whale dolphin octopus turtle snake lizard frog butterfly bee spider corgi

car truck bus train bicycle motorcycle airplane plane boat ship submarine rocket spaceship
spacecraft

house home castle palace tower bridge church temple cathedral city town village street road building
skyscraper room kitchen bedroom library cafe restaurant market shop garden park farm factory station
harbor lighthouse cabin cottage ruins

mountain mountains hill valley forest tree trees flower flowers rose sunflower grass field meadow
desert beach island ocean sea lake river waterfall cave volcano canyon jungle swamp snow ice rain
storm cloud clouds fog mist sky sun moon star stars galaxy nebula planet earth mars space night day
dawn dusk sunrise sunset morning evening spring summer autumn winter rainbow lightning fire smoke
water wave waves

apple orange banana lemon strawberry cake bread cheese pizza burger sushi coffee tea wine bottle cup
glass bowl plate table chair sofa bed lamp candle book clock mirror window door key sword shield
crown hat coat dress shirt shoes mask helmet armor umbrella camera guitar piano violin drum ball toy
teapot

red green blue yellow purple pink brown black white gray grey gold golden silver colorful vibrant
bright dark light pale neon monochrome transparent

big small large tiny huge giant old young new beautiful pretty cute ugly scary happy sad angry
sleepy funny strange magical mysterious majestic epic dramatic cozy elegant ornate intricate
detailed simple clean dirty broken wooden metal stone glassy fluffy furry shiny soft hard wet dry
hot cold warm cool

riding running walking flying swimming sitting standing sleeping eating drinking playing reading
writing dancing fighting jumping looking smiling holding wearing floating growing glowing burning

high low quality resolution best worst masterpiece professional realistic photorealistic
hyperrealistic sharp focus blurry bokeh depth view close up wide angle macro aerial cinematic
lighting studio natural volumetric ambient rim shadows reflections texture background foreground
symmetrical composition trending artstation unreal engine octane ray tracing award winning national
geographic film grain lens hdr uhd bad deformed distorted cropped watermark text signature extra
fingers limbs hands face eyes hair skin body

style made
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
